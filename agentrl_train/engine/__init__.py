"""Step 9 of 9: weights -> ``Completion``s. One module per engine, behind the ``Engine`` protocol."""
