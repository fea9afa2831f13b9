"""Groups of ranks as a Router sees them: started together, restarted together, lost together.

What runs inside an actor belongs in `workers.rank`.
"""
