package main

import (
	"bufio"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"net"

	"sigs.k8s.io/gateway-api-conformance-images/echo-basic/tcpserver"
	"sigs.k8s.io/gateway-api-conformance-images/echo-basic/udpechoserver"
)

// serveTCP answers the lines PING, IS_TLS and TEST on each connection.
func (p pod) serveTCP(listener net.Listener) error {
	for {
		connection, err := listener.Accept()
		if err != nil {
			return err
		}
		go p.answerLines(connection)
	}
}

func (p pod) answerLines(connection net.Conn) {
	defer connection.Close()
	seen := tcpserver.TCPAssertions{Namespace: p.Namespace, Pod: p.Pod}
	if secured, ok := connection.(*tls.Conn); ok {
		if secured.Handshake() != nil {
			return // the client sees the alert
		}
		state := secured.ConnectionState()
		seen.IsTLS = true
		seen.TLSAssertion = &tcpserver.TLSAssertions{ServerName: state.ServerName, NegotiatedProtocol: state.NegotiatedProtocol}
	}
	text, err := json.Marshal(seen)
	if err != nil {
		return
	}
	fmt.Fprint(connection, tcpserver.WelcomeMessage)
	answers := map[string]string{"PING": "PONG", "IS_TLS": fmt.Sprint(seen.IsTLS), "TEST": string(text)}
	lines := bufio.NewScanner(connection)
	for lines.Scan() {
		if answer, ok := answers[lines.Text()]; ok {
			fmt.Fprintln(connection, answer)
		}
	}
}

// serveUDP answers each datagram with what it was and who answers.
func (p pod) serveUDP(socket net.PacketConn) error {
	// No UDP datagram is longer.
	datagram := make([]byte, 65536)
	for {
		n, from, err := socket.ReadFrom(datagram)
		if errors.Is(err, net.ErrClosed) {
			return err
		} else if err != nil {
			continue // an ICMP error of an earlier answer
		}
		text, err := json.Marshal(udpechoserver.EchoResponse{
			Request: string(datagram[:n]), Namespace: p.Namespace, Service: p.Service, Pod: p.Pod,
		})
		if err != nil {
			return err
		}
		_, _ = socket.WriteTo(text, from)
	}
}
