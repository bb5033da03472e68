"""The handlers of the method table, one module for each family of methods."""
