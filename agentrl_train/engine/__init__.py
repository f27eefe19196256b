"""Step 9 of 9: weights -> ``Completion``s. One engine a module; the actor knows the ``Engine`` protocol."""
