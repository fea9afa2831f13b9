"""The part of Envoy's external processing protocol that the endpoint picker needs."""
