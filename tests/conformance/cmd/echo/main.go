// Program echo stands in for the two images of the conformance suite, which are on no module proxy.
//
// `echo advanced` is the server of the mesh tests and `echo client` the command that the suite
// executes in its pods. Both speak the text format that the suite's package echo parses. The server
// speaks HTTP/1.1 and h2c on each --port and gRPC on --grpc. It accepts the image's other arguments
// and serves neither plain TCP (--tcp) nor TLS (--tls): no mesh test of v1.7.0 dials them.
//
// `echo basic` is the server of the Gateway tests: HTTP, gRPC, TCP or UDP, as the environment says.
package main

import (
	"fmt"
	"os"
)

const usage = "usage: echo basic | echo advanced [--port=N]... [--grpc=N] | echo client URL [--method=M] [-H NAME:VALUE]... [--count=N]"

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintf(os.Stderr, "echo: %v\n", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	if len(args) == 0 {
		return fmt.Errorf("no mode is named; %s", usage)
	}
	switch args[0] {
	case "advanced":
		return serve(args[1:])
	case "basic":
		return serveBasic()
	case "client":
		return request(args[1:])
	default:
		return fmt.Errorf("%s is no mode; %s", args[0], usage)
	}
}
