"""Where the configuration that ships lies."""

from pathlib import Path


def conf_dir() -> Path:
    """The shipped configuration: inside the package in a wheel, beside it in a checkout."""
    package = Path(__file__).parents[1]
    inside = package / "conf"
    return inside if inside.is_dir() else package.parent / "conf"
