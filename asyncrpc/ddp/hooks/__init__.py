"""Communication hooks: what reduces a bucket in the place of a plain mean."""
