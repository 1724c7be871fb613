package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"sigs.k8s.io/yaml"
)

// knownDisagreement is a row of known.yaml: a disagreement with the reason for it.
type knownDisagreement struct {
	Case    string `json:"case"`
	Request string `json:"request"`
	Envoy   string `json:"envoy"`
	Canal   string `json:"canal"`
	// Sentence is what a specification says about it, Source the specification.
	Sentence string `json:"sentence"`
	Source   string `json:"source"`
	// Verdict is `canal` if Canal does what the sentence says, `envoy` if Envoy does and Canal does not yet, and
	// `both` if it allows both.
	Verdict string `json:"verdict"`
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
		if row.Sentence == "" || row.Source == "" || !strings.Contains(" canal envoy both ", " "+row.Verdict+" ") {
			return nil, fmt.Errorf("known.yaml: %s, %s: sentence, source and verdict (canal, envoy or both) are needed", row.Case, row.Request)
		}
	}
	return known, nil
}

// judge compares the two observations of every case with the table.
func judge(all *suite, known []knownDisagreement, envoy, canal map[string]observation) []outcome {
	var outcomes []outcome
	for _, one := range all.cases {
		result := outcome{one: one}
		found := compare(one, envoy[one.name], canal[one.name])
		for _, row := range known {
			if row.Case != one.name {
				continue
			}
			kept := found[:0:0]
			isUsed := false
			for _, d := range found {
				isRow := d.Request == row.Request && d.Envoy == row.Envoy && d.Canal == row.Canal
				isUsed = isUsed || isRow
				if !isRow {
					kept = append(kept, d)
				}
			}
			found = kept
			if isUsed {
				result.known = append(result.known, row)
			} else {
				result.unused = append(result.unused, row)
			}
		}
		result.disagreements = found
		outcomes = append(outcomes, result)
	}
	return outcomes
}
