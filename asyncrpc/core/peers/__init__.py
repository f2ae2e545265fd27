"""Other workers as a program sees them: one or several, and calls of them."""
