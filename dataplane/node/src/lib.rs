//! canal-node-proxy: not written yet.
