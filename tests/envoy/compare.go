package main

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
)

// ignoredPrefixes are beginnings of the names of fields that each proxy adds in its own way, and
// that no object of a case speaks about.
var ignoredPrefixes = []string{"x-envoy-", "x-forwarded-", "x-b3-"}

// ignoredFields are such fields by name. The last four frame a message, and each hop frames it anew.
var ignoredFields = []string{
	idHeader, "x-request-id", "via", "server", "date", "traceparent", "tracestate", "connection", "content-length", "transfer-encoding", "keep-alive",
}

// disagreement is a request that Envoy and Canal treat differently.
type disagreement struct {
	Case    string
	Request string
	// Envoy and Canal are what only one of both does, one property a line.
	Envoy []string
	Canal []string
}

// outcome is the verdict about a case.
type outcome struct {
	one           *testCase
	disagreements []disagreement
	// known are the disagreements that the table explains.
	known []knownDisagreement
	// stale are rows of the table that explain nothing any more.
	stale []knownDisagreement
}

// compare compares what happened to the requests of a case, one request after the other.
func compare(one *testCase, envoy, canal observation) []disagreement {
	if envoy.Refusal != canal.Refusal {
		return []disagreement{difference(one.name, "*", describeRefusal(envoy), describeRefusal(canal))}
	}
	var found []disagreement
	for _, request := range one.requests {
		theirs, ours := describe(one, request, envoy), describe(one, request, canal)
		if !slices.Equal(theirs, ours) {
			found = append(found, difference(one.name, request.Text, theirs, ours))
		}
	}
	return found
}

func describeRefusal(seen observation) []string {
	if seen.Refusal == "" {
		return []string{"accepts the objects"}
	}
	return []string{"refuses the objects: " + seen.Refusal}
}

// difference keeps the lines of two descriptions that differ. If none does, they differ in order or number.
func difference(name, request string, envoy, canal []string) disagreement {
	only := func(lines, other []string) []string {
		return slices.DeleteFunc(slices.Clone(lines), func(line string) bool { return slices.Contains(other, line) })
	}
	theirs, ours := only(envoy, canal), only(canal, envoy)
	if len(theirs)+len(ours) == 0 {
		theirs, ours = envoy, canal
	}
	return disagreement{name, request, theirs, ours}
}

// describe returns what happened to a request, one property a line.
func describe(one *testCase, r request, seen observation) []string {
	var lines []string
	for _, got := range seen.Answers {
		if got.ID == r.ID {
			lines = append(lines, describeAnswer(one, got, len(seen.Records[r.ID]) > 0)...)
		}
	}
	records := slices.Clone(seen.Records[r.ID])
	slices.SortStableFunc(records, func(a, b received) int { // pods record for themselves
		return cmp.Or(cmp.Compare(a.Pod, b.Pod), cmp.Compare(a.Host, b.Host))
	})
	lines = append(lines, fmt.Sprintf("backends receive %d", len(records)))
	for _, record := range records {
		lines = append(lines, describeRecord(one, record)...)
	}
	return lines
}

// describeAnswer describes what the client got.
func describeAnswer(one *testCase, got answer, isReceived bool) []string {
	if got.Problem != "" {
		return []string{"the client gets " + got.Problem}
	}
	lines := []string{fmt.Sprintf("status %d", got.Status)}
	isOfBackend := strings.HasPrefix(got.Body, "answer of ")
	if one.Bodies || (isReceived && isOfBackend && !one.AnyPod) {
		lines = append(lines, fmt.Sprintf("body %q", got.Body))
	}
	for name, values := range compared(got.Headers) {
		// The text of a proxy's own answer, and so its type, is compared where a case is about it.
		if name != "content-type" || one.Bodies || isOfBackend {
			lines = append(lines, fmt.Sprintf("answer %s: %s", name, values))
		}
	}
	slices.Sort(lines[1:])
	return lines
}

// describeRecord describes a request as a backend received it.
func describeRecord(one *testCase, seen received) []string {
	pod := seen.Pod
	if one.AnyPod {
		pod = "a pod"
	}
	lines := []string{fmt.Sprintf("%s receives %s %s of %s", pod, seen.Method, seen.Target, seen.Host)}
	if seen.Body != "" {
		lines = append(lines, fmt.Sprintf("%s receives body %q", pod, seen.Body))
	}
	for name, values := range compared(seen.Headers) {
		lines = append(lines, fmt.Sprintf("%s receives %s: %s", pod, name, values))
	}
	slices.Sort(lines[1:])
	return lines
}

// compared returns the fields that are compared, by their names in lower case.
func compared(fields map[string][]string) map[string]string {
	kept := map[string]string{}
	for name := range maps.Keys(fields) {
		lower := strings.ToLower(name)
		isIgnored := slices.Contains(ignoredFields, lower) ||
			slices.ContainsFunc(ignoredPrefixes, func(prefix string) bool { return strings.HasPrefix(lower, prefix) })
		if !isIgnored {
			kept[lower] = strings.Join(fields[name], ", ")
		}
	}
	return kept
}
