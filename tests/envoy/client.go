package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"time"
)

const (
	// answerTimeout bounds the wait for an answer; every delay of a case is far shorter.
	answerTimeout = 20 * time.Second
	// copyTimeout bounds the wait for copies of a request.
	copyTimeout = 10 * time.Second
)

// answer is what a client got for a request.
type answer struct {
	ID      string              `json:"id"`
	Status  int                 `json:"status"`
	Headers map[string][]string `json:"headers"`
	Body    string              `json:"body"`
	// Problem says why there is no answer.
	Problem string `json:"problem"`
}

// order is what a client process is told to send: each request to the address of its host.
type order struct {
	Requests []request `json:"requests"`
	// Addresses are the IP addresses by host name; the one of the empty name is for all others.
	Addresses map[string]string `json:"addresses"`
}

// runClient reads an order, sends its requests one after the other, and writes the answers.
func runClient(in io.Reader, out io.Writer) error {
	told := order{}
	if err := json.NewDecoder(in).Decode(&told); err != nil {
		return err
	}
	answers := []answer{}
	for _, request := range told.Requests {
		answers = append(answers, told.send(request)...)
	}
	return json.NewEncoder(out).Encode(answers)
}

// send sends a request as often as it says.
func (o *order) send(r request) []answer {
	name, _, _ := strings.Cut(r.Host, ":")
	address, isKnown := o.Addresses[name]
	if !isKnown {
		address = o.Addresses[""]
	}
	var answers []answer
	for range r.Times {
		got, err := exchange(net.JoinHostPort(address, strconv.Itoa(r.Port)), r)
		if err != nil {
			got.Problem = "no answer"
		}
		got.ID = r.ID
		answers = append(answers, got)
	}
	return answers
}

// exchange sends a request on a connection of its own. It writes the target as it is, which Go's
// client would change.
func exchange(address string, r request) (answer, error) {
	connection, err := net.DialTimeout("tcp", address, answerTimeout)
	if err != nil {
		return answer{}, err
	}
	defer connection.Close()
	_ = connection.SetDeadline(time.Now().Add(answerTimeout))
	var head strings.Builder
	fmt.Fprintf(&head, "%s %s HTTP/1.1\r\nhost: %s\r\n%s: %s\r\n", r.Method, r.Target, r.Host, idHeader, r.ID)
	for _, header := range r.Headers {
		fmt.Fprintf(&head, "%s: %s\r\n", header[0], header[1])
	}
	if r.Body != "" || r.Method == http.MethodPost || r.Method == http.MethodPut {
		fmt.Fprintf(&head, "content-length: %d\r\n", len(r.Body))
	}
	if _, err := io.WriteString(connection, head.String()+"\r\n"+r.Body); err != nil {
		return answer{}, err
	}
	response, err := http.ReadResponse(bufio.NewReader(connection), &http.Request{Method: r.Method})
	if err != nil {
		return answer{}, err
	}
	defer response.Body.Close()
	body, err := io.ReadAll(io.LimitReader(response.Body, 1<<20))
	return answer{Status: response.StatusCode, Headers: response.Header, Body: string(body)}, err
}

// waitForCopies waits until the backends recorded as many requests as the case says.
func waitForCopies(one *testCase, folder string) (map[string][]received, error) {
	deadline := time.Now().Add(copyTimeout)
	for {
		records, err := readRecords(folder)
		if err != nil {
			return nil, err
		}
		isComplete := true
		for _, request := range one.requests {
			isComplete = isComplete && len(records[request.ID]) >= request.Copies
		}
		if isComplete || time.Now().After(deadline) {
			return records, nil // the comparison shows what is missing
		}
		time.Sleep(20 * time.Millisecond)
	}
}
