"""Requests and responses of the OpenAI API, field by field.

Fields that other interfaces share belong in `api.base.openai_schema`.
"""
