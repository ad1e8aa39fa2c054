"""Generated HTTP requests, hostile ones too, at plain vLLM and at TTLConnector."""
