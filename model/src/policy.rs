//! What users write: Kubernetes, Gateway API, Istio and Canal objects as typed structs. Parsing files is `control/sources`.
