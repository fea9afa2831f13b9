"""The messages of KEDA's external scalers."""
