package report

import (
	"fmt"
	"io"
	"slices"

	"sigs.k8s.io/gateway-api/conformance/utils/suite"
	"sigs.k8s.io/gateway-api/pkg/features"
)

// coreProfiles are the profiles of which every core test is to pass.
var coreProfiles = []suite.ConformanceProfile{
	suite.GatewayHTTPConformanceProfile, suite.GatewayGRPCConformanceProfile,
	suite.MeshHTTPConformanceProfile, suite.MeshGRPCConformanceProfile,
}

// bar is a figure with the least value that it may have.
type bar struct {
	what         string
	value, least int
	all          int
}

func (b bar) isHeld() bool { return b.value >= b.least }

// bars returns the figures that a whole run is judged by.
func bars(outcomes []Outcome) []bar {
	var all []bar
	for _, profile := range coreProfiles {
		b := bar{what: "core tests of " + string(profile.Name) + " that pass"}
		for _, o := range outcomes {
			if profile.CoreFeatures.HasAll(o.Test.Features...) {
				b.all++
				if o.Verdict == Passed {
					b.value++
				}
			}
		}
		b.least = b.all
		all = append(all, b)
	}
	claimed := Claimed()
	proven := bar{what: "claimed features with a passing test, and none that fails", least: len(claimed), all: len(claimed)}
	for _, name := range claimed {
		if isProven(name, outcomes) {
			proven.value++
		}
	}
	names := len(features.SetsToNamesSet(features.AllFeatures))
	half := bar{what: "features that are claimed", value: len(claimed), least: (names + 1) / 2, all: names}
	return append(all, proven, half)
}

// isProven returns whether a test of the feature passed that proves something, and none failed.
func isProven(name features.FeatureName, outcomes []Outcome) bool {
	passed := 0
	for _, o := range outcomes {
		if !slices.Contains(o.Test.Features, name) {
			continue
		}
		if o.Verdict == Failed {
			return false
		}
		if o.proves() {
			passed++
		}
	}
	return passed > 0
}

// Judge writes the figures of a whole run beside their bars, and returns whether all are held.
func Judge(w io.Writer, outcomes []Outcome) bool {
	isHeld := true
	fmt.Fprintln(w)
	for _, b := range bars(outcomes) {
		word := "held"
		if !b.isHeld() {
			word = "MISSED"
			isHeld = false
		}
		fmt.Fprintf(w, "%-7s %d of %d %s (bar: %d)\n", word, b.value, b.all, b.what, b.least)
	}
	return isHeld
}
