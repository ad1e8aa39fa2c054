"""The two roles of the connector, beside vLLM's scheduler and in its workers."""
