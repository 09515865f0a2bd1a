"""What is run by hand: it renews tables that ship with the package, resolves the extras, and draws random compositions by the thousand."""
