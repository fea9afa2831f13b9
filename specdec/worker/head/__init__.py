"""A draft head beside a target: its runner, features, KV, samples, trees and versions."""
