// Package tcpserver declares what the conformance suite's TCP client reads from an echo server. It
// stands in for the package of this path of the suite's images; see package grpcechoserver.
package tcpserver

// WelcomeMessage is the first line that a server sends on each connection.
const WelcomeMessage = "Gateway API Test TCP Server\n"

// TLSAssertions is what the server saw of the TLS session.
type TLSAssertions struct {
	ServerName         string `json:"serverName"`
	NegotiatedProtocol string `json:"negotiatedProtocol,omitempty"`
}

// TCPAssertions is a server's answer to the line `TEST`, as JSON in one line.
type TCPAssertions struct {
	Namespace    string         `json:"namespace"`
	Pod          string         `json:"pod"`
	IsTLS        bool           `json:"isTLS"`
	TLSAssertion *TLSAssertions `json:"tls,omitempty"`
}
