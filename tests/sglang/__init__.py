"""SGLang as a dialect: its rules against recorded logs, and against the installed engine."""
