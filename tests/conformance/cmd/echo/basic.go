package main

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"net"
	"os"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	pb "sigs.k8s.io/gateway-api-conformance-images/echo-basic/grpcechoserver"
)

// pod is who answers.
type pod struct {
	Namespace string `json:"namespace"`
	Service   string `json:"service"`
	Pod       string `json:"pod"`
}

// serveBasic answers on the ports that the environment names, in the protocol that it names, as the
// suite's image for the servers of the Gateway tests does.
func serveBasic() error {
	p := pod{os.Getenv("NAMESPACE"), os.Getenv("SERVICE_NAME"), os.Getenv("POD_NAME")}
	// The first error ends the process, so nothing reads the errors of other servers.
	failed := make(chan error)
	listen := func(variable, port string, serve func(net.Listener) error) {
		go func() {
			listener, err := net.Listen("tcp", ":"+cmp.Or(os.Getenv(variable), port))
			if err == nil {
				err = serve(listener)
			}
			failed <- err
		}()
	}
	// The images of the suite's servers spell this variable in two ways.
	secured := tlsOf(cmp.Or(os.Getenv("TLS_SERVER_PRIVKEY"), os.Getenv("TLS_SERVER_PRIV_KEY")))
	switch {
	case os.Getenv("GRPC_ECHO_SERVER") != "":
		listen("HTTP_PORT", "3000", func(l net.Listener) error { return p.grpcServer().Serve(l) })
		if secured != nil {
			listen("HTTPS_PORT", "8443", func(l net.Listener) error {
				return p.grpcServer(grpc.Creds(credentials.NewTLS(secured))).Serve(l)
			})
		}
	case os.Getenv("TCP_ECHO_SERVER") != "":
		listen("TCP_PORT", "3000", p.serveTCP)
		if secured != nil {
			listen("TLS_PORT", "8443", func(l net.Listener) error { return p.serveTCP(tls.NewListener(l, secured)) })
		}
	case os.Getenv("UDP_ECHO_SERVER") != "":
		socket, err := net.ListenPacket("udp", ":"+cmp.Or(os.Getenv("UDP_PORT"), "8080"))
		if err != nil {
			return err
		}
		return p.serveUDP(socket)
	default:
		port := cmp.Or(os.Getenv("HTTP_PORT"), "3000")
		answerer := newAnswerer(p, port)
		listen("HTTP_PORT", "3000", answerer.http1().Serve)
		listen("H2C_PORT", "3001", answerer.h2c().Serve)
		if secured != nil {
			listen("HTTPS_PORT", "8443", func(l net.Listener) error {
				server := answerer.http1()
				server.TLSConfig = secured
				return server.ServeTLS(l, "", "")
			})
		}
	}
	return <-failed
}

// tlsOf returns the TLS of the environment's certificate and the key, or nil without them. The files
// are read at each handshake, because a Secret may be written after its pod has started.
func tlsOf(key string) *tls.Config {
	certificate, authorities := os.Getenv("TLS_SERVER_CERT"), os.Getenv("TLS_CLIENT_CACERTS")
	if certificate == "" || key == "" {
		return nil
	}
	config := &tls.Config{NextProtos: []string{"h2", "http/1.1"}}
	config.GetCertificate = func(*tls.ClientHelloInfo) (*tls.Certificate, error) {
		pair, err := tls.LoadX509KeyPair(certificate, key)
		return &pair, err
	}
	config.GetConfigForClient = func(*tls.ClientHelloInfo) (*tls.Config, error) {
		if authorities == "" {
			return nil, nil
		}
		text, err := os.ReadFile(authorities)
		if err != nil {
			return nil, err
		}
		checked := config.Clone()
		checked.ClientAuth = tls.VerifyClientCertIfGiven
		checked.ClientCAs = x509.NewCertPool()
		if !checked.ClientCAs.AppendCertsFromPEM(text) {
			return nil, fmt.Errorf("%s has no certificate", authorities)
		}
		return checked, nil
	}
	return config
}

// grpcEcho answers Echo and EchoTwo; EchoThree has no implementation, as the suite expects.
type grpcEcho struct {
	pb.UnimplementedGrpcEchoServer
	pod pod
}

func (p pod) grpcServer(options ...grpc.ServerOption) *grpc.Server {
	server := grpc.NewServer(options...)
	pb.RegisterGrpcEchoServer(server, grpcEcho{pod: p})
	return server
}

func (e grpcEcho) Echo(ctx context.Context, _ *pb.EchoRequest) (*pb.EchoResponse, error) {
	return e.answer(ctx), nil
}

func (e grpcEcho) EchoTwo(ctx context.Context, _ *pb.EchoRequest) (*pb.EchoResponse, error) {
	return e.answer(ctx), nil
}

func (e grpcEcho) answer(ctx context.Context) *pb.EchoResponse {
	seen := &pb.Assertions{Context: &pb.Context{Namespace: e.pod.Namespace, Pod: e.pod.Pod}}
	seen.FullyQualifiedMethod, _ = grpc.Method(ctx)
	headers, _ := metadata.FromIncomingContext(ctx)
	for name, values := range headers {
		for _, value := range values {
			if name == ":authority" {
				seen.Authority = value
			} else {
				seen.Headers = append(seen.Headers, &pb.Header{Key: name, Value: value})
			}
		}
	}
	return &pb.EchoResponse{Assertions: seen}
}

// certificateText returns the certificate as PEM.
func certificateText(certificate *x509.Certificate) string {
	return string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: certificate.Raw}))
}
