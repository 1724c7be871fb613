package main

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
)

// report is the verdict about all cases.
type report struct {
	envoy, istio string
	outcomes     []outcome
}

// isHeld returns whether the table explains all disagreements.
func (r *report) isHeld() bool {
	return !slices.ContainsFunc(r.outcomes, func(o outcome) bool { return len(o.disagreements) > 0 })
}

// verdict returns the verdict about a case in a word or two.
func (o *outcome) verdict() string {
	switch {
	case len(o.disagreements) > 0:
		return "FAILED"
	case len(o.known) > 0:
		return fmt.Sprintf("%d known", len(o.known))
	}
	return "equal"
}

// printObservations prints what happened to each request.
func printObservations(all *suite, envoy, canal map[string]observation) {
	for _, one := range all.cases {
		for _, request := range one.requests {
			fmt.Printf("%s: %s\n", one.name, request.Text)
			fmt.Printf("  Envoy: %s\n", joined(describe(one, request, envoy[one.name])))
			fmt.Printf("  Canal: %s\n", joined(describe(one, request, canal[one.name])))
		}
	}
}

// summary is the line that closes a report.
func (r *report) summary() string {
	requests, equal, known, stale, failed := 0, 0, 0, 0, 0
	for i := range r.outcomes {
		result := &r.outcomes[i]
		requests += len(result.one.requests)
		if len(result.known)+len(result.disagreements) == 0 {
			equal++
		}
		known += len(result.known)
		stale += len(result.stale)
		failed += len(result.disagreements)
	}
	return fmt.Sprintf("%d cases with %d requests: %d cases equal, %d known disagreements, %d stale rows, %d requests with an unknown disagreement",
		len(r.outcomes), requests, equal, known, stale, failed)
}

// text returns the report as it is printed.
func (r *report) text() string {
	var out strings.Builder
	fmt.Fprintf(&out, "Canal beside Envoy %s with the configuration of istiod (istio.io/istio %s)\n", r.envoy, r.istio)
	for i := range r.outcomes {
		result := &r.outcomes[i]
		fmt.Fprintf(&out, "%-8s %-24s %s, %d requests\n", result.verdict(), result.one.name, result.one.Feature, len(result.one.requests))
		for _, d := range result.disagreements {
			fmt.Fprintf(&out, "  %s\n    Envoy: %s\n    Canal: %s\n", d.Request, joined(d.Envoy), joined(d.Canal))
		}
		for _, row := range result.stale {
			fmt.Fprintf(&out, "  STALE: known.yaml explains a disagreement of %s that there is not; fix: remove the row\n", strings.Join(row.Requests, ", "))
		}
	}
	fmt.Fprintln(&out, r.summary())
	return out.String()
}

// joined returns what a proxy does on one line.
func joined(lines []string) string {
	return cmp.Or(strings.Join(lines, "; "), "(nothing else)")
}

// markdown returns the report as a page of the documentation.
func (r *report) markdown() string {
	var out strings.Builder
	fmt.Fprintf(&out, `<!-- Written by `+"`make test-compat`"+`. -->
# Canal beside Envoy and istiod

Each row is a feature of Istio's HTTP API. The same objects went to istiod, whose configuration Envoy %s
runs, and to Canal; the same requests went to both. Compared are the status and header fields of the
answer, the number of requests that backends receive, and method, path, authority, header fields and
body of each. Not compared are fields that each proxy adds in its own way (`+"`x-envoy-*`, `x-forwarded-*`,\n`x-request-id`, `via`, `server`, `date`"+`, traces), the framing of messages, and the texts of errors that no
object asks for. istiod is the code of `+"`istio.io/istio`"+` %s.

The cases are tests/envoy/cases, istiod's configurations tests/envoy/rendered (`+"`make render-istiod`"+` renders
them again), and the reasons of disagreements tests/envoy/known.yaml.

%s.

| feature | case | requests | verdict |
|---|---|---|---|
`, r.envoy, r.istio, r.summary())
	for i := range r.outcomes {
		result := &r.outcomes[i]
		fmt.Fprintf(&out, "| %s | %s | %d | %s |\n", cell(result.one.Feature), result.one.name, len(result.one.requests), result.verdict())
	}
	out.WriteString("\n## Disagreements\n\n| case, requests | Envoy | Canal | what the specification says | who does it |\n|---|---|---|---|---|\n")
	for i := range r.outcomes {
		for _, row := range r.outcomes[i].known {
			requests := "all"
			if !slices.Contains(row.Requests, "*") {
				requests = "`" + strings.Join(row.Requests, "`, `") + "`"
			}
			fmt.Fprintf(&out, "| %s: %s | %s | %s | \"%s\" (%s) | %s |\n", row.Case, cell(requests), cell(joined(row.Envoy)), cell(joined(row.Canal)),
				cell(row.Sentence), cell(row.Source), verdicts[row.Verdict])
		}
	}
	return out.String()
}

// cell returns a text as a cell of a table.
func cell(text string) string {
	return strings.ReplaceAll(strings.ReplaceAll(strings.TrimSpace(text), "\n", " "), "|", `\|`)
}
