//! canal-gateway-engine: not written yet.
