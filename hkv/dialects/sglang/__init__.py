"""SGLang 0.5.23's rules as a dialect."""
