package main

import (
	"fmt"
	"strings"
)

// report is the verdict about all cases.
type report struct {
	envoy, istio string
	outcomes     []outcome
}

func (r *report) isHeld() bool {
	for i := range r.outcomes {
		if !r.outcomes[i].isHeld() {
			return false
		}
	}
	return true
}

// printObservations prints what happened to each request.
func printObservations(all *suite, envoy, canal map[string]observation) {
	for _, one := range all.cases {
		for _, request := range one.requests {
			fmt.Printf("%s: %s\n", one.name, request.Text)
			fmt.Printf("  Envoy: %s\n", strings.ReplaceAll(describe(one, request, envoy[one.name]), "\n", "; "))
			fmt.Printf("  Canal: %s\n", strings.ReplaceAll(describe(one, request, canal[one.name]), "\n", "; "))
		}
	}
}

// counts returns the numbers of requests, of cases without a disagreement, of disagreements that are known and of
// failures.
func (r *report) counts() (requests, equal, known, failed int) {
	for i := range r.outcomes {
		result := &r.outcomes[i]
		requests += len(result.one.requests)
		if len(result.known)+len(result.disagreements)+len(result.unused) == 0 {
			equal++
		}
		known += len(result.known)
		failed += len(result.disagreements) + len(result.unused)
	}
	return requests, equal, known, failed
}

// summary is the line that closes a report.
func (r *report) summary() string {
	requests, equal, known, failed := r.counts()
	return fmt.Sprintf("%d cases, %d requests: %d cases equal, %d known disagreements, %d failures",
		len(r.outcomes), requests, equal, known, failed)
}

// text returns the report as it is printed.
func (r *report) text() string {
	var out strings.Builder
	fmt.Fprintf(&out, "Canal beside Envoy %s with the configuration of istiod (istio.io/istio %s)\n", r.envoy, r.istio)
	for i := range r.outcomes {
		result := &r.outcomes[i]
		verdict := "equal"
		if len(result.known) > 0 {
			verdict = fmt.Sprintf("%d known", len(result.known))
		}
		if !result.isHeld() {
			verdict = "FAILED"
		}
		fmt.Fprintf(&out, "%-8s %-28s %s, %d requests\n", verdict, result.one.name, result.one.Feature, len(result.one.requests))
		for _, d := range result.disagreements {
			fmt.Fprintf(&out, "  %s\n    Envoy: %s\n    Canal: %s\n", d.Request, d.Envoy, d.Canal)
		}
		for _, row := range result.unused {
			fmt.Fprintf(&out, "  %s: known.yaml explains a disagreement that there is not; fix: remove or change the row\n", row.Request)
		}
	}
	fmt.Fprintln(&out, r.summary())
	return out.String()
}

// verdicts say who does what a sentence says.
var verdicts = map[string]string{"canal": "Canal does", "envoy": "Envoy does; Canal does not yet", "both": "both may"}

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
		verdict := "equal"
		if n := len(result.known); n > 0 {
			verdict = fmt.Sprintf("%d known", n)
		}
		if !result.isHeld() {
			verdict = "**failed**"
		}
		fmt.Fprintf(&out, "| %s | %s | %d | %s |\n", cell(result.one.Feature), result.one.name, len(result.one.requests), verdict)
	}
	out.WriteString("\n## Disagreements\n\n| case, request | Envoy | Canal | what the specification says | who does it |\n|---|---|---|---|---|\n")
	for i := range r.outcomes {
		for _, row := range r.outcomes[i].known {
			fmt.Fprintf(&out, "| %s, `%s` | %s | %s | \"%s\" (%s) | %s |\n", row.Case, cell(row.Request), cell(row.Envoy), cell(row.Canal),
				cell(row.Sentence), cell(row.Source), verdicts[row.Verdict])
		}
	}
	return out.String()
}

// cell returns a text as a cell of a table.
func cell(text string) string {
	return strings.ReplaceAll(strings.ReplaceAll(strings.TrimSpace(text), "\n", " "), "|", `\|`)
}
