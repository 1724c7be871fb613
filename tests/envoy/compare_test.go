package main

import (
	"slices"
	"strings"
	"testing"
)

func seen(status int, header string, records ...received) observation {
	return observation{
		Answers: []answer{{ID: "a.0", Status: status, Headers: map[string][]string{"X-A": {header}, "Date": {"today"}}}},
		Records: map[string][]received{"a.0": records},
	}
}

func TestDisagreementsAreWhatOnlyOneDoes(t *testing.T) {
	one := &testCase{name: "a", requests: []request{{Text: "GET /", ID: "a.0"}}}
	record := received{ID: "a.0", Pod: "one-0", Method: "GET", Target: "/", Host: "h", Headers: map[string][]string{"Via": {"1.1 x"}}}
	if found := compare(one, seen(200, "b", record), seen(200, "b", record)); len(found) > 0 {
		t.Fatalf("two equal observations disagree: %v", found)
	}
	found := compare(one, seen(200, "b", record), seen(404, "b"))
	if len(found) != 1 {
		t.Fatalf("an answer of another status is no disagreement: %v", found)
	}
	theirs := []string{"status 200", "backends receive 1", "one-0 receives GET / of h"}
	if !slices.Equal(found[0].Envoy, theirs) || !slices.Equal(found[0].Canal, []string{"status 404", "backends receive 0"}) {
		t.Fatalf("the disagreement has other lines: %v", found[0])
	}
	// A second attempt of the same form differs by its number only.
	found = compare(one, seen(200, "b", record, record), seen(200, "b", record))
	if len(found) != 1 || found[0].Envoy[0] != "backends receive 2" {
		t.Fatalf("the number of attempts is not compared: %v", found)
	}
}

func TestRowsExplainOnlyWhatTheyName(t *testing.T) {
	one := &testCase{name: "a", requests: []request{{Text: "GET /", ID: "a.0"}}}
	all := &suite{cases: []*testCase{one}}
	envoy, canal := map[string]observation{"a": seen(200, "b")}, map[string]observation{"a": seen(404, "c")}
	row := knownDisagreement{Case: "a", Requests: []string{"GET /"}, Envoy: []string{"status 200"}, Canal: []string{"status 404"}}
	result := judge(all, []knownDisagreement{row}, envoy, canal)[0]
	if len(result.known) != 1 || len(result.disagreements) != 1 || !slices.Equal(result.disagreements[0].Envoy, []string{"answer x-a: b"}) {
		t.Fatalf("the header is explained by a row about the status: %+v", result)
	}
	if result.verdict() != "FAILED" {
		t.Fatalf("an unknown disagreement is %s", result.verdict())
	}
	row.Requests = []string{"GET /other"}
	result = judge(all, []knownDisagreement{row}, envoy, canal)[0]
	if len(result.stale) != 1 || len(result.known) != 0 {
		t.Fatalf("a row about another request is used: %+v", result)
	}
}

func TestRequestsAreReadAsWritten(t *testing.T) {
	read, err := readRequest(`POST http://a.example:8080/x?y=z "x-a:b c" x-e: @times=3 @body=hello`)
	if err != nil {
		t.Fatal(err)
	}
	headers := [][2]string{{"x-a", "b c"}, {"x-e", ""}}
	if read.Host != "a.example:8080" || read.Port != 8080 || read.Target != "/x?y=z" || read.Times != 3 || read.Body != "hello" ||
		!slices.Equal(read.Headers, headers) {
		t.Fatalf("%+v", read)
	}
	for _, wrong := range []string{"GET", "GET /x @none=1", `GET /x "open`, "GET /x word", "GET http://host"} {
		if _, err := readRequest(wrong); err == nil {
			t.Errorf("%s is read", wrong)
		}
	}
}

func TestAWrongCommandLineIsNamed(t *testing.T) {
	for _, arguments := range [][]string{{"-only=retries", "stray"}, {"inside", "stray"}, {"stray"}} {
		status, err := start(arguments)
		if status != 2 || err == nil || !strings.Contains(err.Error(), "stray") {
			t.Errorf("%v: exit code %d, %v", arguments, status, err)
		}
	}
}
