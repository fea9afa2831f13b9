"""Anthropic's Messages API.

`/v1/messages` and `/v1/messages/count_tokens`, as conversions to and from the chats of
`cluster.api.openai`, which prepares, parses and limits them. What both share belongs there.
"""
