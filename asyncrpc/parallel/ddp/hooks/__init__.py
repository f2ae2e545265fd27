"""Communication hooks, which reduce a bucket in place of a plain mean."""
