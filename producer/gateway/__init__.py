"""The HTTP gateway: OpenAI's API and the pool's own, over FastAPI. Extra [gateway]."""
