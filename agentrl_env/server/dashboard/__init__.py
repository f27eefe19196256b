"""The page at ``/``: what an operator looks at, and tools called by hand."""
