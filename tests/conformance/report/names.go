package report

import (
	"fmt"
	"slices"
	"strings"

	"sigs.k8s.io/gateway-api/conformance/utils/suite"
)

// CheckName returns an error if no test of the suite has this name; "" stands for all tests. The error
// names the test whose name is nearest.
func CheckName(name string, all []suite.ConformanceTest) error {
	nearest, least := "", 0
	for _, test := range all {
		if name == "" || name == test.ShortName {
			return nil
		}
		distance := editDistance(strings.ToLower(name), strings.ToLower(test.ShortName))
		if nearest == "" || distance < least {
			nearest, least = test.ShortName, distance
		}
	}
	return fmt.Errorf("the suite has no test %q; fix: write its name, such as the nearest one, %s", name, nearest)
}

// editDistance returns the number of bytes to insert, remove or replace until both words are equal.
func editDistance(a, b string) int {
	row := make([]int, len(b)+1)
	for at := range row {
		row[at] = at
	}
	for i := range len(a) {
		// The value of the row above, one column to the left.
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			replaced := diagonal
			if a[i] != b[j] {
				replaced++
			}
			diagonal = row[j+1]
			row[j+1] = slices.Min([]int{replaced, row[j] + 1, diagonal + 1})
		}
	}
	return row[len(b)]
}
