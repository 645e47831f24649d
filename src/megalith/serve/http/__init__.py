"""The HTTP side of the server: Megatron's `PUT /api`, OpenAI's endpoints and the page. Needs the `serve` extra."""
