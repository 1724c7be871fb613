// Program canal-bench-istiod renders what istiod makes of Kubernetes and Istio objects for one
// Envoy, with istiod's own code: its discovery server runs in this process, on objects that are
// read from files in place of a Kubernetes API. Stock Envoy runs the result.
package main

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

const usage = `usage: canal-bench-istiod render [--check] DIR

Renders what istiod makes of the objects of each case of DIR/cases for one Envoy, into DIR/rendered.

  DIR/cases/_base.yaml   objects that all cases share: Services, Pods, Gateways
  DIR/cases/NAME.yaml    a case. The first document describes it: ` + "`proxy: gateway`" + ` (the default) or
                         ` + "`proxy: sidecar`" + ` is the proxy that the result is for. The others are objects.
  DIR/rendered/NAME.json the result: the versions and the objects that it was made from, what was left
                         out or changed so that Envoy runs it without istiod, and Envoy's bootstrap

EndpointSlices are made from the Pods that a Service selects, as Kubernetes makes them. The result
is the same for the same objects. Existing results of cases that do not exist any more are removed.

  --check   write nothing, and fail if a result is not what istiod makes of its objects

Exit codes: 0 done, 1 a case cannot be rendered or --check found differences, 2 the command line is wrong.
`

func main() {
	os.Exit(run(os.Args[1:]))
}

func run(arguments []string) int {
	flags := flag.NewFlagSet("canal-bench-istiod", flag.ContinueOnError)
	flags.SetOutput(os.Stderr)
	flags.Usage = func() { fmt.Fprint(flags.Output(), usage) }
	isCheck := flags.Bool("check", false, "")
	if len(arguments) > 0 && slices.Contains([]string{"-h", "-help", "--help", "help"}, arguments[0]) {
		fmt.Print(usage)
		return 0
	}
	if len(arguments) == 0 || arguments[0] != "render" {
		fmt.Fprint(os.Stderr, usage)
		return 2
	}
	switch err := flags.Parse(arguments[1:]); {
	case errors.Is(err, flag.ErrHelp):
		return 0
	case err != nil:
		return 2
	case flags.NArg() != 1:
		fmt.Fprint(os.Stderr, usage)
		return 2
	}
	quieten()
	if err := renderAll(flags.Arg(0), *isCheck); err != nil {
		fmt.Fprintf(os.Stderr, "canal-bench-istiod: %v\n", err)
		return 1
	}
	return 0
}

// renderAll renders every case of the folder, and removes results without a case.
func renderAll(folder string, isCheck bool) error {
	files, err := filepath.Glob(filepath.Join(folder, "cases", "*.yaml"))
	if err != nil {
		return err
	}
	base, err := os.ReadFile(filepath.Join(folder, "cases", "_base.yaml"))
	if err != nil {
		return fmt.Errorf("the objects that all cases share: %w", err)
	}
	results := filepath.Join(folder, "rendered")
	if err := os.MkdirAll(results, 0o755); err != nil {
		return err
	}
	old, err := filepath.Glob(filepath.Join(results, "*.json"))
	if err != nil {
		return err
	}
	var faults []error
	rendered := 0
	for _, file := range files {
		name := strings.TrimSuffix(filepath.Base(file), ".yaml")
		// Files whose name begins with `_` are shared by cases and are none themselves.
		if strings.HasPrefix(name, "_") {
			continue
		}
		result := filepath.Join(results, name+".json")
		old = slices.DeleteFunc(old, func(path string) bool { return path == result })
		if err := renderFile(file, result, base, isCheck); err != nil {
			faults = append(faults, fmt.Errorf("%s: %w", file, err))
			continue
		}
		rendered++
	}
	for _, path := range old {
		if isCheck {
			faults = append(faults, fmt.Errorf("%s is of no case; fix: render without --check", path))
		} else if err := os.Remove(path); err != nil {
			faults = append(faults, err)
		}
	}
	fmt.Printf("%d cases rendered into %s\n", rendered, results)
	return errors.Join(faults...)
}

func renderFile(file, result string, base []byte, isCheck bool) error {
	text, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	one, err := readCase(text, base)
	if err != nil {
		return err
	}
	made, err := one.render()
	if err != nil {
		return err
	}
	if !isCheck {
		return os.WriteFile(result, made, 0o644)
	}
	existing, err := os.ReadFile(result)
	if err != nil {
		return err
	}
	if string(existing) != string(made) {
		return fmt.Errorf("%s is not what istiod makes of the objects; fix: render without --check", result)
	}
	return nil
}
