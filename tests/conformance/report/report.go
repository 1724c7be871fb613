// Package report counts the verdicts on the suite's tests, and finds reasons in the suite's log.
package report

import (
	"fmt"
	"io"
	"slices"
	"strings"

	"sigs.k8s.io/gateway-api/conformance/utils/suite"
	"sigs.k8s.io/gateway-api/pkg/features"
)

// Verdict is the result of one test.
type Verdict string

const (
	Passed Verdict = "passed"
	Failed Verdict = "failed"
	NotRun Verdict = "not run"
)

// Outcome is a test with its verdict, and the reason if the verdict is not Passed or proves nothing
// ([DriverPart]).
type Outcome struct {
	Test    suite.ConformanceTest
	Verdict Verdict
	Reason  string
}

// proves returns whether the outcome proves something about Canal.
func (o Outcome) proves() bool { return o.Verdict == Passed && DriverPart(o.Test) == "" }

// Write writes a line for each test, then the counts: of each profile's core tests, of each
// feature's tests, and of all.
func Write(w io.Writer, outcomes []Outcome) {
	for _, o := range outcomes {
		line := fmt.Sprintf("%-8s %s", o.Verdict, o.Test.ShortName)
		if o.Reason != "" {
			line += ": " + o.Reason
		}
		fmt.Fprintln(w, line)
	}
	fmt.Fprintf(w, "\n%-60s %6s %6s %8s %6s\n", "tests", Passed, Failed, NotRun, "all")
	for _, profile := range coreProfiles {
		writeCounts(w, string(profile.Name)+" core", outcomes, func(test suite.ConformanceTest) bool {
			return profile.CoreFeatures.HasAll(test.Features...)
		})
	}
	for _, name := range featureNames() {
		writeCounts(w, string(name), outcomes, func(test suite.ConformanceTest) bool {
			return slices.Contains(test.Features, name)
		})
	}
	writeCounts(w, "all", outcomes, func(suite.ConformanceTest) bool { return true })
}

func writeCounts(w io.Writer, name string, outcomes []Outcome, counts func(suite.ConformanceTest) bool) {
	of := map[Verdict]int{}
	all := 0
	for _, o := range outcomes {
		if counts(o.Test) {
			of[o.Verdict]++
			all++
		}
	}
	fmt.Fprintf(w, "%-60s %6d %6d %8d %6d\n", name, of[Passed], of[Failed], of[NotRun], all)
}

// featureNames returns the names of all features of the suite, sorted.
func featureNames() []features.FeatureName {
	names := features.SetsToNamesSet(features.AllFeatures).UnsortedList()
	slices.SortFunc(names, func(a, b features.FeatureName) int { return strings.Compare(string(a), string(b)) })
	return names
}
