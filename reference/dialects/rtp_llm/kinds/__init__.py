"""What RTP-LLM does with each type of group, one type a file; `kind` has what they share."""
