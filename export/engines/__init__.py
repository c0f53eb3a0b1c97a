"""The engines that prove artifacts, and the TensorRT engines that an export builds."""
