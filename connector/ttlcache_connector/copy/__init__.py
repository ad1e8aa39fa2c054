"""vLLM's KV tensors as block layouts, and the engines that copy them to host memory."""
