// Package grpcechoserver declares the gRPC service that the conformance suite calls: its messages,
// its client and its registration. The suite imports it by this path from the module of its images,
// which the module proxy does not serve; this stand-in has the names and the wire numbers that the
// suite's client needs. The messages are written by hand, with the tags from which the protobuf
// library derives their encoding, so that no generated code is needed.
package grpcechoserver

import (
	"context"
	"fmt"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// ServiceName is the full name of the gRPC service.
const ServiceName = "gateway_api_conformance.echo_basic.grpcecho.GrpcEcho"

// Header is one metadata entry of a request.
type Header struct {
	Key   string `protobuf:"bytes,1,opt,name=key,proto3"`
	Value string `protobuf:"bytes,2,opt,name=value,proto3"`
}

// Context says which pod answered.
type Context struct {
	Namespace string `protobuf:"bytes,1,opt,name=namespace,proto3"`
	Pod       string `protobuf:"bytes,4,opt,name=pod,proto3"`
}

// Assertions is what the server saw of a request.
type Assertions struct {
	FullyQualifiedMethod string    `protobuf:"bytes,1,opt,name=fully_qualified_method,proto3"`
	Headers              []*Header `protobuf:"bytes,2,rep,name=headers,proto3"`
	Authority            string    `protobuf:"bytes,3,opt,name=authority,proto3"`
	Context              *Context  `protobuf:"bytes,4,opt,name=context,proto3"`
}

// EchoRequest is the request of every method; it is empty.
type EchoRequest struct{}

// EchoResponse is the answer of every method.
type EchoResponse struct {
	Assertions *Assertions `protobuf:"bytes,1,opt,name=assertions,proto3"`
}

func (m *Header) Reset()         { *m = Header{} }
func (m *Header) String() string { return m.Key + ": " + m.Value }
func (m *Header) ProtoMessage()  {}

func (m *Context) Reset()         { *m = Context{} }
func (m *Context) String() string { return m.Namespace + "/" + m.Pod }
func (m *Context) ProtoMessage()  {}

func (m *Assertions) Reset() { *m = Assertions{} }
func (m *Assertions) String() string {
	return fmt.Sprintf("%s by %v", m.FullyQualifiedMethod, m.Context)
}
func (m *Assertions) ProtoMessage() {}

func (m *EchoRequest) Reset()         { *m = EchoRequest{} }
func (m *EchoRequest) String() string { return "{}" }
func (m *EchoRequest) ProtoMessage()  {}

func (m *EchoResponse) Reset()         { *m = EchoResponse{} }
func (m *EchoResponse) String() string { return fmt.Sprint(m.Assertions) }
func (m *EchoResponse) ProtoMessage()  {}

// GetNamespace returns the namespace, or "" of a nil message.
func (m *Context) GetNamespace() string {
	if m == nil {
		return ""
	}
	return m.Namespace
}

// GetPod returns the pod's name, or "" of a nil message.
func (m *Context) GetPod() string {
	if m == nil {
		return ""
	}
	return m.Pod
}

// GetFullyQualifiedMethod returns the method's path, or "" of a nil message.
func (m *Assertions) GetFullyQualifiedMethod() string {
	if m == nil {
		return ""
	}
	return m.FullyQualifiedMethod
}

// GetContext returns the pod that answered, or nil of a nil message.
func (m *Assertions) GetContext() *Context {
	if m == nil {
		return nil
	}
	return m.Context
}

// GetAssertions returns what the server saw, or nil of a nil message.
func (m *EchoResponse) GetAssertions() *Assertions {
	if m == nil {
		return nil
	}
	return m.Assertions
}

// GrpcEchoClient calls the service.
type GrpcEchoClient interface {
	Echo(ctx context.Context, in *EchoRequest, opts ...grpc.CallOption) (*EchoResponse, error)
	EchoTwo(ctx context.Context, in *EchoRequest, opts ...grpc.CallOption) (*EchoResponse, error)
	EchoThree(ctx context.Context, in *EchoRequest, opts ...grpc.CallOption) (*EchoResponse, error)
}

type grpcEchoClient struct{ conn grpc.ClientConnInterface }

// NewGrpcEchoClient returns a client that calls over the connection.
func NewGrpcEchoClient(conn grpc.ClientConnInterface) GrpcEchoClient { return grpcEchoClient{conn} }

func (c grpcEchoClient) call(ctx context.Context, method string, in *EchoRequest, opts []grpc.CallOption) (*EchoResponse, error) {
	out := new(EchoResponse)
	if err := c.conn.Invoke(ctx, "/"+ServiceName+"/"+method, in, out, opts...); err != nil {
		return nil, err
	}
	return out, nil
}

func (c grpcEchoClient) Echo(ctx context.Context, in *EchoRequest, opts ...grpc.CallOption) (*EchoResponse, error) {
	return c.call(ctx, "Echo", in, opts)
}

func (c grpcEchoClient) EchoTwo(ctx context.Context, in *EchoRequest, opts ...grpc.CallOption) (*EchoResponse, error) {
	return c.call(ctx, "EchoTwo", in, opts)
}

func (c grpcEchoClient) EchoThree(ctx context.Context, in *EchoRequest, opts ...grpc.CallOption) (*EchoResponse, error) {
	return c.call(ctx, "EchoThree", in, opts)
}

// GrpcEchoServer answers the service's methods.
type GrpcEchoServer interface {
	Echo(context.Context, *EchoRequest) (*EchoResponse, error)
	EchoTwo(context.Context, *EchoRequest) (*EchoResponse, error)
	EchoThree(context.Context, *EchoRequest) (*EchoResponse, error)
}

// UnimplementedGrpcEchoServer answers every method with code UNIMPLEMENTED. The suite expects that
// of EchoThree.
type UnimplementedGrpcEchoServer struct{}

func (UnimplementedGrpcEchoServer) Echo(context.Context, *EchoRequest) (*EchoResponse, error) {
	return nil, status.Error(codes.Unimplemented, "Echo is not implemented")
}

func (UnimplementedGrpcEchoServer) EchoTwo(context.Context, *EchoRequest) (*EchoResponse, error) {
	return nil, status.Error(codes.Unimplemented, "EchoTwo is not implemented")
}

func (UnimplementedGrpcEchoServer) EchoThree(context.Context, *EchoRequest) (*EchoResponse, error) {
	return nil, status.Error(codes.Unimplemented, "EchoThree is not implemented")
}

// RegisterGrpcEchoServer makes the registrar answer the service's methods with the server's.
func RegisterGrpcEchoServer(registrar grpc.ServiceRegistrar, server GrpcEchoServer) {
	registrar.RegisterService(&grpc.ServiceDesc{
		ServiceName: ServiceName,
		HandlerType: (*GrpcEchoServer)(nil),
		Methods: []grpc.MethodDesc{
			method("Echo", GrpcEchoServer.Echo),
			method("EchoTwo", GrpcEchoServer.EchoTwo),
			method("EchoThree", GrpcEchoServer.EchoThree),
		},
	}, server)
}

func method(name string, answer func(GrpcEchoServer, context.Context, *EchoRequest) (*EchoResponse, error)) grpc.MethodDesc {
	handler := func(server any, ctx context.Context, decode func(any) error, interceptor grpc.UnaryServerInterceptor) (any, error) {
		in := new(EchoRequest)
		if err := decode(in); err != nil {
			return nil, err
		}
		call := func(ctx context.Context, in any) (any, error) {
			return answer(server.(GrpcEchoServer), ctx, in.(*EchoRequest))
		}
		if interceptor == nil {
			return call(ctx, in)
		}
		info := &grpc.UnaryServerInfo{Server: server, FullMethod: "/" + ServiceName + "/" + name}
		return interceptor(ctx, in, info, call)
	}
	return grpc.MethodDesc{MethodName: name, Handler: handler}
}
