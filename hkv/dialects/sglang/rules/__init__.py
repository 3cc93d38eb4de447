"""SGLang's rules as compiled transitions: match, admission, allocation, insertion, eviction."""
