"""Rules of RTP-LLM for each type of group, one type a file; `kind` has what they share."""
