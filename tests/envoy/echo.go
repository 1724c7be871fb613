package main

import (
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"sort"
	"strconv"
	"strings"
	"sync"
	"time"
)

const (
	// idHeader names a request in what backends record.
	idHeader = "x-case-id"
	// Headers by which a request says how backends answer it: statuses of the attempts, a delay of each, the
	// number of attempts that are reset, and headers of the answer.
	statusHeader = "x-echo-status"
	delayHeader  = "x-echo-delay"
	resetHeader  = "x-echo-reset"
	setHeader    = "x-echo-set"
)

// received is a request as a backend received it.
type received struct {
	ID      string              `json:"id"`
	Pod     string              `json:"pod"`
	Method  string              `json:"method"`
	Target  string              `json:"target"`
	Host    string              `json:"host"`
	Headers map[string][]string `json:"headers"`
	Body    string              `json:"body"`
}

// echo is a backend: it records every request in a file, and answers as the request asks for.
type echo struct {
	pod     string
	records *os.File

	mu sync.Mutex
	// attempts counts the requests by their names.
	attempts map[string]int
}

// newEcho returns the backend of a pod, whose records are in a file of the folder.
func newEcho(pod, folder string) (*echo, error) {
	file, err := os.OpenFile(filepath.Join(folder, pod+".jsonl"), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o644)
	if err != nil {
		return nil, err
	}
	return &echo{pod: pod, records: file, attempts: map[string]int{}}, nil
}

// serve answers at the address, and returns when it listens.
func (e *echo) serve(address string) error {
	listener, err := net.Listen("tcp", address)
	if err != nil {
		return err
	}
	go func() { _ = http.Serve(listener, e) }()
	return nil
}

func (e *echo) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, _ := io.ReadAll(io.LimitReader(r.Body, 1<<20))
	id := r.Header.Get(idHeader)
	attempt := e.record(received{id, e.pod, r.Method, r.RequestURI, r.Host, r.Header, string(body)})
	if delay, err := time.ParseDuration(r.Header.Get(delayHeader)); err == nil {
		time.Sleep(delay)
	}
	if resets, err := strconv.Atoi(r.Header.Get(resetHeader)); err == nil && attempt < resets {
		panic(http.ErrAbortHandler) // the server closes the connection
	}
	for item := range strings.SplitSeq(r.Header.Get(setHeader), ",") {
		if name, value, ok := strings.Cut(item, ":"); ok {
			w.Header().Add(name, value)
		}
	}
	status := http.StatusOK
	if statuses := r.Header.Get(statusHeader); statuses != "" {
		list := strings.Split(statuses, ",")
		if code, err := strconv.Atoi(list[min(attempt, len(list)-1)]); err == nil {
			status = code
		}
	}
	w.WriteHeader(status)
	fmt.Fprintf(w, "answer of %s\n", e.pod)
}

// record writes what was received, and returns how many requests of the same name came before.
func (e *echo) record(seen received) int {
	e.mu.Lock()
	defer e.mu.Unlock()
	attempt := e.attempts[seen.ID]
	e.attempts[seen.ID]++
	if text, err := json.Marshal(seen); err == nil && seen.ID != "" {
		_, _ = e.records.Write(append(text, '\n'))
	}
	return attempt
}

// readRecords returns what the backends recorded in the folder, by the names of requests.
func readRecords(folder string) (map[string][]received, error) {
	files, err := filepath.Glob(filepath.Join(folder, "*.jsonl"))
	if err != nil {
		return nil, err
	}
	sort.Strings(files)
	found := map[string][]received{}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			return nil, err
		}
		for line := range strings.Lines(string(text)) {
			seen := received{}
			if json.Unmarshal([]byte(line), &seen) == nil { // else the line is half written
				found[seen.ID] = append(found[seen.ID], seen)
			}
		}
	}
	return found, nil
}
