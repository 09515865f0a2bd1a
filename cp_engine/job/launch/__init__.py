"""Launch: ranks that start, are watched and end. Of `job` it imports `checks`."""
