"""Steps on the device: prompts, decodes and drafts between one copy to it and one back."""
