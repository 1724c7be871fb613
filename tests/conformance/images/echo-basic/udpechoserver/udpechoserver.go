// Package udpechoserver declares the answer of an echo server to a datagram. It stands in for the
// package of this path of the suite's images; see package grpcechoserver.
package udpechoserver

// EchoResponse is the answer to one datagram, as JSON.
type EchoResponse struct {
	Request   string `json:"request"`
	Namespace string `json:"namespace"`
	Service   string `json:"service"`
	Pod       string `json:"pod"`
}
