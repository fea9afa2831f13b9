"""A draft worker that several Routers share: its seats, its loop, and its restart.

A draft worker of one Router is a group like others: `workers.groups`.
"""
