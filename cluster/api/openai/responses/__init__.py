"""The Responses API: its input as a chat, its tools, the items of its output."""
