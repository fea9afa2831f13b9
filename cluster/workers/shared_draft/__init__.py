"""Draft workers that several Routers share: their loop, their seats, and the choice among them.

A draft worker of one Router is a group like others: `workers.groups`.
"""
