"""RTP-LLM's rules as objects, written before the text and apart from it: frozen, so that the text is held to them."""
