package main

import (
	"context"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"os"
	"slices"
	"strings"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
)

// serve answers on all ports of the arguments until one of them fails.
func serve(args []string) error {
	failed := make(chan error)
	for _, arg := range args {
		name, port, _ := strings.Cut(strings.TrimPrefix(arg, "--"), "=")
		var listen func(port string) error
		switch name {
		case "port":
			listen = listenHTTP
		case "grpc":
			listen = listenGRPC
		case "tcp", "tls", "crt", "key":
			continue
		default:
			return fmt.Errorf("argument %s is not known; %s", arg, usage)
		}
		go func() { failed <- listen(port) }()
	}
	return <-failed
}

func listenHTTP(port string) error {
	server := http.Server{Addr: ":" + port, Protocols: new(http.Protocols)}
	server.Protocols.SetHTTP1(true)
	server.Protocols.SetUnencryptedHTTP2(true)
	server.Handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		lines := []string{
			"ServicePort=" + port, "Host=" + r.Host, "URL=" + r.URL.RequestURI(), "Method=" + r.Method,
			"Proto=" + r.Proto, "IP=" + addressOf(r.RemoteAddr),
		}
		w.Header().Set("Content-Type", "text/plain")
		_, _ = io.WriteString(w, bodyOf(lines, r.Header))
	})
	return server.ListenAndServe()
}

func listenGRPC(port string) error {
	listener, err := net.Listen("tcp", ":"+port)
	if err != nil {
		return err
	}
	server := grpc.NewServer()
	server.RegisterService(&grpc.ServiceDesc{
		ServiceName: grpcService,
		Methods:     []grpc.MethodDesc{{MethodName: grpcMethod, Handler: answerGRPC}},
	}, nil)
	return server.Serve(listener)
}

func answerGRPC(_ any, ctx context.Context, decode func(any) error, _ grpc.UnaryServerInterceptor) (any, error) {
	if err := decode(new(message)); err != nil {
		return nil, err
	}
	headers, _ := metadata.FromIncomingContext(ctx)
	lines := []string{"StatusCode=200", "Proto=GRPC", "Host=" + strings.Join(headers.Get(":authority"), "")}
	if from, ok := peer.FromContext(ctx); ok {
		lines = append(lines, "IP="+addressOf(from.Addr.String()))
	}
	return &message{Text: bodyOf(lines, headers)}, nil
}

// bodyOf returns the lines of an answer: what the server saw, then each header, then its pod's name.
func bodyOf(lines []string, headers map[string][]string) string {
	for _, name := range slices.Sorted(maps.Keys(headers)) {
		for _, value := range headers[name] {
			lines = append(lines, "RequestHeader="+name+":"+value)
		}
	}
	lines = append(lines, "Hostname="+os.Getenv("POD_NAME"))
	return strings.Join(lines, "\n") + "\n"
}

func addressOf(hostPort string) string {
	host, _, err := net.SplitHostPort(hostPort)
	if err != nil {
		return hostPort
	}
	return host
}
