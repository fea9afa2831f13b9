"""Parts of all network interfaces: credentials, errors, limits of bodies, and event streams.

The routes of one interface belong in its own folder.
"""
