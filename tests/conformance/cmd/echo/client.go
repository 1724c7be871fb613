package main

import (
	"context"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
)

// The gRPC method of the mesh tests' image, and its message: one text, both ways.
const (
	grpcService = "proto.EchoTestService"
	grpcMethod  = "Echo"
)

type message struct {
	Text string `protobuf:"bytes,1,opt,name=message,proto3"`
}

func (m *message) Reset()         { *m = message{} }
func (m *message) String() string { return m.Text }
func (m *message) ProtoMessage()  {}

// requestTimeout bounds one request. The suite repeats a failed one.
const requestTimeout = 10 * time.Second

// call is what the client's arguments say.
type call struct {
	url     *url.URL
	method  string
	headers http.Header
	count   int
}

// request sends the requests one after the other on one connection, and prints each answer; an
// empty line separates answers. Answers of any status are printed; only a request without an answer
// is an error.
func request(args []string) error {
	c, err := parseCall(args)
	if err != nil {
		return err
	}
	send := c.sendHTTP()
	if c.url.Scheme == "grpc" {
		if send, err = c.sendGRPC(); err != nil {
			return err
		}
	}
	for i := range c.count {
		answer, err := send(i)
		if err != nil {
			return fmt.Errorf("request %d to %s: %w", i, c.url, err)
		}
		if i > 0 {
			fmt.Println()
		}
		fmt.Print(answer)
	}
	return nil
}

func parseCall(args []string) (*call, error) {
	c := &call{method: http.MethodGet, headers: http.Header{}, count: 1}
	for i := 0; i < len(args); i++ {
		arg := args[i]
		var err error
		switch name, value, _ := strings.Cut(arg, "="); {
		case arg == "-H" && i+1 < len(args):
			i++
			name, value, _ := strings.Cut(args[i], ":")
			c.headers.Add(name, value)
		case name == "--method":
			c.method = value
		case name == "--count":
			c.count, err = strconv.Atoi(value)
		case !strings.HasPrefix(arg, "-") && c.url == nil:
			c.url, err = url.Parse(arg)
		default:
			err = fmt.Errorf("not known; %s", usage)
		}
		if err != nil {
			return nil, fmt.Errorf("argument %s: %w", arg, err)
		}
	}
	if c.url == nil {
		return nil, fmt.Errorf("no URL is named; %s", usage)
	}
	return c, nil
}

func (c *call) sendHTTP() func(i int) (string, error) {
	client := http.Client{
		Timeout:       requestTimeout,
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
	return func(i int) (string, error) {
		request, err := http.NewRequest(c.method, c.url.String(), nil)
		if err != nil {
			return "", err
		}
		request.Header = c.headers.Clone()
		if host := c.headers.Get("Host"); host != "" {
			request.Host = host
		}
		response, err := client.Do(request)
		if err != nil {
			return "", err
		}
		defer response.Body.Close()
		body, err := io.ReadAll(response.Body)
		if err != nil {
			return "", err
		}
		var text strings.Builder
		fmt.Fprintf(&text, "[%d] Url=%s\n[%d] StatusCode=%d\n", i, c.url, i, response.StatusCode)
		for _, name := range slices.Sorted(maps.Keys(response.Header)) {
			for _, value := range response.Header[name] {
				fmt.Fprintf(&text, "[%d] ResponseHeader=%s:%s\n", i, name, value)
			}
		}
		writeBody(&text, i, string(body))
		return text.String(), nil
	}
}

func (c *call) sendGRPC() (func(i int) (string, error), error) {
	connection, err := grpc.NewClient("passthrough:///"+c.url.Host,
		grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return nil, err
	}
	return func(i int) (string, error) {
		ctx, cancel := context.WithTimeout(context.Background(), requestTimeout)
		defer cancel()
		for name, values := range c.headers {
			for _, value := range values {
				ctx = metadata.AppendToOutgoingContext(ctx, name, value)
			}
		}
		answer := new(message)
		if err := connection.Invoke(ctx, "/"+grpcService+"/"+grpcMethod, new(message), answer); err != nil {
			return "", err
		}
		var text strings.Builder
		fmt.Fprintf(&text, "[%d] Url=%s\n", i, c.url)
		writeBody(&text, i, answer.Text)
		return text.String(), nil
	}, nil
}

// writeBody writes the body's lines, without empty ones: those separate answers.
func writeBody(text *strings.Builder, i int, body string) {
	for line := range strings.Lines(body) {
		if line = strings.TrimSpace(line); line != "" {
			fmt.Fprintf(text, "[%d body] %s\n", i, line)
		}
	}
}
