package main

import (
	"net"
	"net/http"
	"net/url"
	"testing"
	"time"

	pb "sigs.k8s.io/gateway-api-conformance-images/echo-basic/grpcechoserver"
	"sigs.k8s.io/gateway-api/conformance/utils/config"
	suitegrpc "sigs.k8s.io/gateway-api/conformance/utils/grpc"
	suitehttp "sigs.k8s.io/gateway-api/conformance/utils/http"
	"sigs.k8s.io/gateway-api/conformance/utils/roundtripper"
	"sigs.k8s.io/gateway-api/conformance/utils/tcp"
	"sigs.k8s.io/gateway-api/conformance/utils/udp"
)

// The judge of these tests is the client that the suite itself uses for the server.

var tested = pod{Namespace: "ns", Service: "backend", Pod: "backend-r0-0"}

func listen(t *testing.T) net.Listener {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = listener.Close() })
	return listener
}

func get(t *testing.T, address, target string, headers map[string][]string) (*roundtripper.CapturedRequest, *roundtripper.CapturedResponse, error) {
	t.Helper()
	u, err := url.Parse("http://" + address + target)
	if err != nil {
		t.Fatal(err)
	}
	client := &roundtripper.DefaultRoundTripper{TimeoutConfig: config.DefaultTimeoutConfig()}
	return client.CaptureRoundTrip(roundtripper.Request{T: t, URL: *u, Host: "example.org", Protocol: "HTTP", Headers: headers})
}

func TestSuiteReadsAnswerToHTTP(t *testing.T) {
	listener := listen(t)
	go func() { _ = newAnswerer(tested, "3000").http1().Serve(listener) }()
	address := listener.Addr().String()

	headers := map[string][]string{"X-Echo-Set-Header": {"x-a: 1, x-a: 2"}}
	request, response, err := get(t, address, "//path?q=1", headers)
	if err != nil {
		t.Fatal(err)
	}
	expected := suitehttp.ExpectedResponse{
		Request:   suitehttp.Request{Path: "//path?q=1", Host: "example.org", Method: "GET"},
		Response:  suitehttp.Response{StatusCodes: []int{200}, Headers: map[string]string{"X-A": "1,2"}},
		Backend:   "backend",
		Namespace: "ns",
	}
	sent := roundtripper.Request{Method: "GET"}
	if err := suitehttp.CompareRoundTrip(t, &sent, request, response, expected); err != nil {
		t.Error(err)
	}

	if _, response, err = get(t, address, "/status/418", nil); err != nil || response.StatusCode != http.StatusTeapot {
		t.Errorf("/status/418: %v, %v", response, err)
	}
	retry := "/retry/x?succeedAfter=1&responseCode=503&uuid=a"
	for _, code := range []int{503, 200} {
		if _, response, err = get(t, address, retry, nil); err != nil || response.StatusCode != code {
			t.Errorf("%s: %v, %v; expected %d", retry, response, err, code)
		}
	}
	if _, _, err = get(t, address, "/retry/x?succeedAfter=1&uuid=b", nil); err == nil {
		t.Error("the connection was not reset")
	}
}

func TestSuiteReadsAnswerToGRPC(t *testing.T) {
	listener := listen(t)
	go func() { _ = tested.grpcServer().Serve(listener) }()
	suitegrpc.MakeRequestAndExpectEventuallyConsistentResponse(t, nil, config.DefaultTimeoutConfig(),
		listener.Addr().String(), suitegrpc.ExpectedResponse{EchoRequest: &pb.EchoRequest{}, Backend: "backend", Namespace: "ns"})
}

func TestSuiteReadsAnswerToTCP(t *testing.T) {
	listener := listen(t)
	go func() { _ = tested.serveTCP(listener) }()
	name, err := tcp.EchoSendOnce(t.Context(), listener.Addr().String(), time.Minute)
	if err != nil || name != tested.Pod {
		t.Errorf("%q, %v", name, err)
	}
	tcp.MakeTCPRequestAndExpectEventuallyValidResponse(t, config.DefaultTimeoutConfig(), listener.Addr().String(),
		nil, "", false, tcp.ExpectedResponse{Backend: "backend", Namespace: "ns"})
}

func TestSuiteReadsAnswerToUDP(t *testing.T) {
	socket, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = socket.Close() })
	go func() { _ = tested.serveUDP(socket) }()
	udp.ExpectEchoResponseFromBackend(t, config.DefaultTimeoutConfig(), socket.LocalAddr().String(),
		udp.ExpectedResponse{Service: "backend", Namespace: "ns"})
}
