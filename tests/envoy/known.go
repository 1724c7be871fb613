package main

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"sigs.k8s.io/yaml"
)

// knownDisagreement is a row of known.yaml: a disagreement with the reason for it.
type knownDisagreement struct {
	Case string `json:"case"`
	// Requests are the requests that it is about, as the case has them; `*` is all of the case.
	Requests []string `json:"requests"`
	// Envoy and Canal are what only one of both does, as the report prints it.
	Envoy []string `json:"envoy"`
	Canal []string `json:"canal"`
	// Sentence is what a specification says about it, Source the specification.
	Sentence string `json:"sentence"`
	Source   string `json:"source"`
	// Verdict is one of verdicts.
	Verdict string `json:"verdict"`
}

// verdicts say who does what a sentence says.
var verdicts = map[string]string{
	"canal":  "Canal does it",
	"envoy":  "Envoy does it, and Canal does not yet",
	"both":   "it allows both",
	"chosen": "Canal differs on purpose: docs/compatibility.md, docs/operations/authorization.md",
}

// readKnown reads the table.
func readKnown(folder string) ([]knownDisagreement, error) {
	text, err := os.ReadFile(filepath.Join(folder, "known.yaml"))
	if err != nil {
		return nil, err
	}
	var known []knownDisagreement
	if err := yaml.UnmarshalStrict(text, &known); err != nil {
		return nil, fmt.Errorf("known.yaml: %w", err)
	}
	for _, row := range known {
		if row.Sentence == "" || row.Source == "" || len(row.Requests) == 0 || verdicts[row.Verdict] == "" {
			return nil, fmt.Errorf("known.yaml: %s, %v: requests, sentence, source and verdict (%s) are needed",
				row.Case, row.Requests, strings.Join(slices.Sorted(maps.Keys(verdicts)), ", "))
		}
	}
	return known, nil
}

// judge compares the two observations of every case, and takes out what the table explains.
func judge(all *suite, known []knownDisagreement, envoy, canal map[string]observation) []outcome {
	var outcomes []outcome
	for _, one := range all.cases {
		result := outcome{one: one}
		isUsed := make([]bool, len(known))
		for _, found := range compare(one, envoy[one.name], canal[one.name]) {
			for i, row := range known {
				if row.Case == one.name && row.explains(&found) {
					isUsed[i] = true
				}
			}
			if len(found.Envoy)+len(found.Canal) > 0 {
				result.disagreements = append(result.disagreements, found)
			}
		}
		for i, row := range known {
			switch {
			case row.Case != one.name:
			case isUsed[i]:
				result.known = append(result.known, row)
			default:
				result.stale = append(result.stale, row)
			}
		}
		outcomes = append(outcomes, result)
	}
	return outcomes
}

// explains takes what the row is about out of a disagreement. It returns false, and changes nothing, if
// not all of it is there.
func (k *knownDisagreement) explains(found *disagreement) bool {
	if !slices.Contains(k.Requests, found.Request) && !slices.Contains(k.Requests, "*") {
		return false
	}
	theirs, hasTheirs := without(found.Envoy, k.Envoy)
	ours, hasOurs := without(found.Canal, k.Canal)
	if !hasTheirs || !hasOurs {
		return false
	}
	found.Envoy, found.Canal = theirs, ours
	return true
}

// without returns the lines that are not among the others, if all the others are among the lines.
func without(lines, others []string) ([]string, bool) {
	for _, other := range others {
		if !slices.Contains(lines, other) {
			return lines, false
		}
	}
	return slices.DeleteFunc(slices.Clone(lines), func(line string) bool { return slices.Contains(others, line) }), true
}

// propose returns rows for what the table does not explain, without the reasons.
func propose(outcomes []outcome) string {
	var rows []knownDisagreement
	for i := range outcomes {
		for _, d := range outcomes[i].disagreements {
			same := slices.IndexFunc(rows, func(row knownDisagreement) bool {
				return row.Case == d.Case && slices.Equal(row.Envoy, d.Envoy) && slices.Equal(row.Canal, d.Canal)
			})
			if same >= 0 {
				rows[same].Requests = append(rows[same].Requests, d.Request)
				continue
			}
			rows = append(rows, knownDisagreement{Case: d.Case, Requests: []string{d.Request}, Envoy: d.Envoy, Canal: d.Canal})
		}
	}
	text, err := yaml.Marshal(rows)
	if err != nil {
		return err.Error()
	}
	return string(text)
}
